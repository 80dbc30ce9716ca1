"""What follows from the MJCF of any robot, and the base class of tasks that are built on it.

Belongs here: ``robot_model`` reads a compiled model (base, home posture, actuators, feet, pairs,
IMU); ``preparation`` completes a model (servos, floor, camera, sensors) before it is compiled;
``robot_task`` is a ``Task`` whose action 0 holds the home posture, ``terms`` a weighted reward;
``velocity``, ``rough_terrain``, ``target`` and ``pick`` are tasks of any robot.

Does not belong here: tasks of one robot (``tasks``), and stepping and rendering (``physics``).

To derive one more property, add a field to ``RobotModel`` with a case in
tests/envs/robots/test_robot_model.py.
"""
